"""Silences gRPC's core on stderr when imported before grpc, unless GRPC_VERBOSITY is set.

By default the core logs whatever text a peer puts into a GOAWAY, including line breaks and escape sequences, and a line
for each connection that ends. A call's status says all that concerns the call, and our processes log that. The core
reads the variable only when it is imported.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
