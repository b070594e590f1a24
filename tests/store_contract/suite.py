"""All parts of the contract in one class."""

from tests.store_contract.failures import FailuresContract
from tests.store_contract.listing import ListingContract
from tests.store_contract.objects import ObjectsContract
from tests.store_contract.preconditions import PreconditionsContract
from tests.store_contract.reading import ReadingContract
from tests.store_contract.streams import StreamsContract


class StoreContract(
    ObjectsContract,
    ReadingContract,
    ListingContract,
    PreconditionsContract,
    StreamsContract,
    FailuresContract,
):
    """The guarantees. Each test leaves the store checked, not only the answer."""
