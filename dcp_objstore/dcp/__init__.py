"""The torch floor: DCP's StorageWriter and StorageReader on top of a checkpoint on a store."""
