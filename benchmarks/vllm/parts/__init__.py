"""What `benchmarks.vllm_ttft` measures, part by part."""
