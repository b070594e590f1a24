"""torch.distributed.checkpoint straight to S3, GCS and any other object store.

    import dcp_objstore as dos

    dcp.save(state, storage_writer=dos.ObjectStoreWriter("s3://bucket/run/step-1000"))
    dcp.load(state, storage_reader=dos.ObjectStoreReader("s3://bucket/run/step-1000"))

The public names are those of `__init__.pyi`. They are resolved on first use, so importing this
package does not import torch.
"""

import lazy_loader

__version__ = "0.1.0.dev0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
