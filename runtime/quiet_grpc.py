"""Imported before grpc, ends what gRPC's core says on stderr by itself; GRPC_VERBOSITY, where it is set, is left alone.

By default it logs whatever a peer has put into a GOAWAY, line breaks and escape sequences among it, and a line of its
own for connections that end. What concerns a call is in the call's status, and our processes log that. The core reads
the variable when it is imported, and not again.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
