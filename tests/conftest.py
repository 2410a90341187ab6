"""Settings of all tests: Hypothesis examples have no deadline, because the machine may be busy; without a GPU, Triton
interprets its kernels; gRPC's core logs nothing among the results; started processes heed Ctrl-C."""

import os
import signal
from pathlib import Path

from hypothesis import settings

settings.register_profile("patient", parent=settings(), deadline=None)
settings.load_profile("patient")

# Must be set before Triton is imported: its own functions are built for one mode at import. Asking torch for a GPU
# would make each small test run pay for importing torch.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Same as runtime/grpc_setup/quiet.py; must be set before grpc is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# A shell that runs tests in the background has them ignore Ctrl-C; processes that they interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
