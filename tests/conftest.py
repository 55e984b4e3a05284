"""For all tests: Ctrl-C works, even where whoever started them ignores it, as background jobs do."""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
