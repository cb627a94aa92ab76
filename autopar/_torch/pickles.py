"""Checkpoints' own index, read without executing anything."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._python_dispatch
import torch.utils._pytree

# Exact names: `torch.distributed.checkpoint.metadata` as a whole would let an index say `metadata.os.system`. BytesStorageMetadata is left out:
# DCP reads tensors with `weights_only`, but entries of that kind by unpickling.
_INDEX_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath"},
}  # fmt: skip


def restricted_reader(place: Any) -> Any:
    """A DCP reader of a folder (a Path) or URL whose index may hold only tensors' records in DCP's plain types: opening it, and reading what it lists, runs nothing
    that the files say."""
    import io
    import pickle

    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
            if name in _INDEX_NAMES.get(module, ()) or dtype:
                return super().find_class(module, name)
            raise pickle.UnpicklingError(f"the checkpoint's index names {module}.{name}, which is no record of a checkpoint")

    kind: Any = FileSystemReader
    if isinstance(place, str):
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader as kind

    class Reader(kind):  # type: ignore[misc] # of one of two classes, known at run time
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            with self.fs.create_stream(self.fs.concat_path(self.path, ".metadata"), "rb") as f:
                metadata = Unpickler(io.BytesIO(f.read())).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError("the checkpoint's index is none")
            if any("/" in info.relative_path or "\\" in info.relative_path for info in metadata.storage_data.values()):
                raise pickle.UnpicklingError("the checkpoint's index names a file outside its folder")
            if metadata.storage_meta is None:
                metadata.storage_meta = StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            return metadata

    return Reader(place)
