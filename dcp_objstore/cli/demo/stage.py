"""Run the demo for the command: choose the place, run the story, print the table, clean up."""

from __future__ import annotations

import importlib.util
import signal
import sys
import time

from dcp_objstore.cli.demo.launcher import warm_up
from dcp_objstore.cli.demo.place import Place
from dcp_objstore.cli.demo.proofs import ProofFailedError
from dcp_objstore.cli.demo.report import Printer
from dcp_objstore.cli.demo.story import DemoFailedError, Settings, Story
from dcp_objstore.cli.exits import fail
from dcp_objstore.cli.seaweedfs import find_weed
from dcp_objstore.errors import UnsupportedError


def run_demo(settings: Settings, url: str | None, *, keep: bool) -> None:
    """Run the demo and print it; exit with status 1 if a proof does not hold.

    Args:
        settings: the numbers of ranks.
        url: the URL below which to save; None to start a server on loopback.
        keep: keep the checkpoints, or the server, for the user to look at.

    Raises:
        DcpObjstoreError: the place cannot be used, or a rank raised the error.
    """
    began = time.monotonic()
    if importlib.util.find_spec("pydoc_data") is None:
        raise UnsupportedError("this Python has no pydoc_data, the text that the demo trains on")
    printer = Printer()
    printer.headline("dcp-objstore demo: train, kill a rank in mid-save, resume, prove")
    with _prepare(url, keep=keep) as place:
        printer.say(f"saving to {place.described}")
        story = Story(place, settings, printer)
        try:
            story.run()
        except (ProofFailedError, DemoFailedError) as error:
            printer.failure(str(error))
            if isinstance(error, DemoFailedError) and error.log:
                print(f"the end of that process's output:\n{error.log}", file=sys.stderr)
            fail(f"the demo failed: {error}")
        printer.table()
        seconds = time.monotonic() - began
        printer.title(f"All {printer.proofs} proofs hold, in {seconds:.0f} s.")
        if keep:
            _show_what_is_kept(place, printer)


def _prepare(url: str | None, *, keep: bool) -> Place:
    if url is not None:
        place = Place.in_bucket(url, keep=keep)
        warm_up()
        return place
    find_weed()  # if it is missing, says how to install it, before anything starts
    warm_up()
    return Place.on_loopback()


def _show_what_is_kept(place: Place, printer: Printer) -> None:
    if place.server is None:
        printer.say(f"kept: {place.run_url}")
        return
    server = place.server
    printer.say("the server runs until Ctrl-C; to look around, in another terminal:")
    try:
        for name, value in (
            ("AWS_ENDPOINT_URL", server.endpoint_url),
            ("AWS_ACCESS_KEY_ID", server.access_key),
            ("AWS_SECRET_ACCESS_KEY", server.secret_key),
        ):
            printer.verbatim(f"export {name}={value}")
        printer.verbatim(f"dcp-objstore ls {place.run_url}")
        while True:
            signal.pause()
    except KeyboardInterrupt:
        printer.say("ended")
