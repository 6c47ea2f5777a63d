"""Events from other tools' files: one module per format. `docs/events.md` says how each is read."""
