"""`vllm.grpc.engine.VllmEngine`, by which the SMG gateway reaches an engine. Messages: package smg-grpc-proto."""
