"""Read a catalogue: a folder of adapters, a bucket's prefix, or a file that lists adapters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from configs.catalogue import FILE_NAME, CatalogueEntry, parse_catalogue
from configs.reading import is_encodable, read_text
from sources.base import CONFIG_NAME, MAX_CONFIG_BYTES
from sources.files import fingerprint

S3_PREFIX = "s3://"


@dataclass(frozen=True)
class CatalogueListing:
    """What a catalogue offers now.

    entries: by the names that clients use; each has its reference.
    versions: a text for each name that changes with the adapter's files.
    """

    entries: dict[str, CatalogueEntry] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


class ListedPrefix(Protocol):
    """A prefix of a bucket; raises AdapterError or Unreachable."""

    def tags(self, prefix: str) -> dict[str, dict[str, str]]:
        """The tags of the files in each folder under a prefix, by folder and name."""
        ...

    def text(self, prefix: str, name: str, max_bytes: int) -> str | None:
        """A small file under a prefix; None if there is none."""
        ...


def read_catalogue(
    location: str, bucket: ListedPrefix | None, reference: Callable[[Path], str]
) -> CatalogueListing:
    """Read the catalogue; OSError or ValueError if it cannot be read, and what `bucket` raises.

    bucket: of a location that begins with s3://. reference: names a folder of this node.
    """
    if location.startswith(S3_PREFIX):
        assert bucket is not None, "checked by the config"
        return _of_prefix(location, bucket)
    path = Path(location)
    if not path.is_dir():
        entries = parse_catalogue(read_text(path, MAX_CONFIG_BYTES))
        return _listing(entries, {})
    # A tool that writes an adapter beside its final folder hides it until then.
    children = (child for child in sorted(path.iterdir()) if is_encodable(child.name))
    shown = (child for child in children if not child.name.startswith("."))
    folders = [child for child in shown if (child / CONFIG_NAME).is_file()]
    found = {folder.name: CatalogueEntry(adapter=reference(folder)) for folder in folders}
    versions = {folder.name: _version(folder) for folder in folders}
    extras = path / FILE_NAME
    text = read_text(extras, MAX_CONFIG_BYTES) if extras.is_file() else ""
    return _with_extras(found, versions, text)


def _version(folder: Path) -> str:
    try:
        return repr(fingerprint(folder))
    except OSError:  # It is being written, or deleted.
        return ""


def _of_prefix(location: str, bucket: ListedPrefix) -> CatalogueListing:
    found, versions = {}, {}
    for name, tags in sorted(bucket.tags(location).items()):
        if CONFIG_NAME in tags:
            found[name] = CatalogueEntry(adapter=f"{location.rstrip('/')}/{name}")
            versions[name] = repr(sorted(tags.items()))
    return _with_extras(found, versions, bucket.text(location, FILE_NAME, MAX_CONFIG_BYTES) or "")


def _with_extras(
    found: dict[str, CatalogueEntry], versions: dict[str, str], text: str
) -> CatalogueListing:
    """Add the file's pins and shares; its entries may name adapters of other sources too."""
    entries = dict(found)
    for name, entry in parse_catalogue(text).items():
        if entry.adapter is None and name in found:
            entries[name] = entry.model_copy(update={"adapter": found[name].adapter})
        elif entry.adapter is not None:
            entries[name] = entry
        # Else its folder is not there yet, or not any more.
    return _listing(entries, versions)


def _listing(entries: Mapping[str, CatalogueEntry], versions: dict[str, str]) -> CatalogueListing:
    whole = {
        name: entry if entry.adapter else entry.model_copy(update={"adapter": name})
        for name, entry in entries.items()
    }
    return CatalogueListing(whole, versions)
