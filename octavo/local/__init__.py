from configs.groups.compilation import CompilationConfig, CompilationLevel, CompilationMode, CUDAGraphMode

__all__ = ["CUDAGraphMode", "CompilationConfig", "CompilationLevel", "CompilationMode"]
