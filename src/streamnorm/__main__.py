"""The command `streamnorm`, and `python -m streamnorm`: a process that ends without a traceback."""

import os
import sys

try:
    from .lab.starting import STOPPED, stoppable
except ModuleNotFoundError:
    sys.exit("streamnorm: this installation has no lab, which the command line is for: install the whole package")

CLOSED_PIPE = 128 + 13  # as a shell names the end by SIGPIPE


def main() -> int:
    try:
        with stoppable():
            from .lab import cli
        try:
            return cli.main()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:  # before the command has begun, or after its end
        print("\nstreamnorm: stopped", file=sys.stderr)
        return STOPPED
    except BrokenPipeError:  # whoever read has seen enough, as `head` has
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):  # Python flushes them once more
            os.dup2(nowhere, stream.fileno())
        return CLOSED_PIPE


if __name__ == "__main__":
    sys.exit(main())
