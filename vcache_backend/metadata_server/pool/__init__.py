"""The pool's state: segments, slots, chunks, leases, reservations. Pure: no socket, no file."""
