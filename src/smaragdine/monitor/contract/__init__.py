"""The gRPC contract, proto/smaragdine/v1/monitor.proto, as protoc compiled it. `make proto` makes it anew."""
