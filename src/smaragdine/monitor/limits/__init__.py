"""Limits on loan: set by a process of its own (keeper), which brings every previous value back in the end.

control is the parent's side of the keeper, leases says who holds what until when, desk puts the two together
for the daemon.
"""
