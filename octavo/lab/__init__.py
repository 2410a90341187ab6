"""The parts that planning, tuning, sweeps and the kernel tuner share: settings, bounds, journals, flags and figures."""
