"""The gRPC contract, proto/smaragdine/v1/monitor.proto, as protoc compiled it. `make proto` makes it anew.

This file only says where the daemon of this machine listens, so that asking for it loads nothing more.
"""

DEFAULT_SOCKET = "/run/smaragdine/monitor.sock"
ADDRESS_VARIABLE = "SMARAGDINE_DAEMON"
