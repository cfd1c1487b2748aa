"""Which compiled files a GPU component may load, as digests. Floor 4; needs neither a GPU nor, while sources are unchanged, a compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from alpha.component import Component
from alpha.cuda_runtime.compile import Source
from alpha.cuda_runtime.manifest import binary_digests


class Binaries:
    """`Component.binaries` from a function that lists sources; the sources of a whole catalogue can be asked for."""

    def __init__(self, sources: Callable[[], Iterable[Source]]) -> None:
        self._sources = sources
        self._listed: tuple[Source, ...] = ()

    def sources(self) -> tuple[Source, ...]:
        """Each once; listed when first asked for."""
        self._listed = self._listed or tuple(dict.fromkeys(self._sources()))
        return self._listed

    def __call__(self) -> Mapping[str, str]:
        return binary_digests(self.sources())


def sources_of(components: Iterable[Component]) -> list[Source]:
    """Every compiled file that these components may load, each once, sorted."""
    found: dict[Source, None] = {}
    for c in components:
        if isinstance(c.binaries, Binaries):
            found.update(dict.fromkeys(c.binaries.sources()))
    return sorted(found, key=str)
