"""The folder that a training run leaves its checkpoint in: tried before anything is loaded, written at once or not."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from colo.memory.uninterrupted import uninterrupted

_OF_A_CHECKPOINT = ("config.json", "adapter_config.json", "*.safetensors", "*.safetensors.index.json", "*.bin")


class OutputFolder:
    """Where a run saves, and nobody else's checkpoint is."""

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        """Make the folder, and try to write to it.

        Raises: `FileExistsError` where another run has left a checkpoint, unless it may be overwritten; `OSError` where
        nothing can be written.
        """
        self.path = path
        self._overwrite = overwrite
        try:
            path.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=path) as file:
                file.write(b"0")
        except OSError as error:
            raise OSError(f"{path} cannot be written to ({error.strerror or error}): choose another folder") from error
        if not overwrite and (found := _checkpoint_files(path)):
            raise FileExistsError(
                f"{path} has the checkpoint of another run ({', '.join(found[:3])}): choose another folder, or pass "
                "--overwrite_output_dir"
            )

    def save(self, model: Any, tokenizer: Any) -> Path:
        """Write model and tokenizer; where they are. All files or none are there after an interrupt.

        Where another run has saved to the folder since this one began, it is another folder, with a number.
        """
        path = self.path if self._overwrite else _free(self.path)
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=path, prefix=".saving-") as partial:
            model.save_pretrained(partial)
            if tokenizer is not None:
                tokenizer.save_pretrained(partial)
            with uninterrupted():
                for name in _checkpoint_files(path):  # those of another model may have other names
                    (path / name).unlink()
                for file in sorted(Path(partial).iterdir()):
                    if file.is_dir():
                        shutil.rmtree(path / file.name, ignore_errors=True)
                    file.replace(path / file.name)
        return path


def _free(path: Path) -> Path:
    """The path, or the first numbered one beside it without a checkpoint."""
    number, found = 1, path
    while _checkpoint_files(found):
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    return found


def _checkpoint_files(path: Path) -> list[str]:
    return sorted({file.name for pattern in _OF_A_CHECKPOINT for file in path.glob(pattern)})
