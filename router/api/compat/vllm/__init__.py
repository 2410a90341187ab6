"""vLLM's own gRPC services: vllm.Inference and vllm.Control."""
