"""SGLang's gRPC service, sglang.grpc.scheduler.SglangScheduler, as its routers call it."""
