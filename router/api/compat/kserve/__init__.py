"""`inference.GRPCInferenceService`, the protocol of KServe and of Triton's clients (protos/kserve.proto)."""
