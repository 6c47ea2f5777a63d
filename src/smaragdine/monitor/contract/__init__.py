"""The gRPC contract, proto/smaragdine/v1/monitor.proto, as protoc compiled it. `make proto` makes it anew.

Here is only where this machine's daemon listens: whoever asks need not load what it takes to talk to it.
"""

DEFAULT_SOCKET = "/run/smaragdine/monitor.sock"
ADDRESS_VARIABLE = "SMARAGDINE_DAEMON"
