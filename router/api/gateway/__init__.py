"""HTTP as OpenAI's clients speak it, over the same intake as gRPC."""
