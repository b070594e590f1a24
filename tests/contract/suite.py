"""All parts of the contract in one class."""

from tests.contract.copies import CopiesContract
from tests.contract.failures import FailuresContract
from tests.contract.listing import ListingContract
from tests.contract.objects import ObjectsContract
from tests.contract.preconditions import PreconditionsContract
from tests.contract.reading import ReadingContract
from tests.contract.streams import StreamsContract


class StoreContract(
    ObjectsContract,
    ReadingContract,
    ListingContract,
    PreconditionsContract,
    StreamsContract,
    CopiesContract,
    FailuresContract,
):
    """The guarantees. Each test leaves the store checked, not only the answer."""
