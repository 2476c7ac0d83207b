"""What holds for the whole suite."""

import signal


def pytest_configure():
    """Let Ctrl-C work in the tests and their processes even where the suite was started with it ignored (`&`)."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
