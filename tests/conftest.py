"""What every test starts from."""

from __future__ import annotations

import signal

# A shell starts background jobs with Ctrl-C ignored, and nohup ignores a hangup: the programs under test
# would inherit that.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)
