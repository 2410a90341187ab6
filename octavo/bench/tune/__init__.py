"""`octavo bench kernels --tune`: finds the fastest tiles of a kernel on the GPUs of this machine.

problem.py defines the tiles to try, measure.py times one of them in a process per GPU, gpu_process.py talks to that
process, tuner.py spreads the work and records its results, so that an interrupted run can continue.
"""
