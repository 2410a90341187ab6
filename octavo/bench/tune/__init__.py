"""`octavo bench kernels --tune`: looks for the fastest tiles of a kernel on the GPUs of this machine.

problem.py says what is tried, measure.py times one try in a process of its GPU, gpu_process.py talks to that process,
tuner.py spreads the work and remembers what is done, so that an interrupted run goes on.
"""
