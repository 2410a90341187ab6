"""C++ kernels for this machine's CPU: built by the system's compiler on first use, and cached."""
