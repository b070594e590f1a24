"""The public names of `dcp_objstore.measure` and where each is defined."""

from .api import (
    BenchReport as BenchReport,
    Spread as Spread,
    Throughput as Throughput,
    bench as bench,
)
