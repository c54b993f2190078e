"""DeepSeek-V4's cache: a window ring a layer, and what a compressing layer adds to it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxspec.cache.pages import CacheOptions, PageTables
from jaxspec.config import DeepseekV4Config
from jaxspec.execution import Execution
from jaxspec.sharding import constrain


@functools.partial(jax.tree_util.register_dataclass, data_fields=["raw", "pages"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Compressed:
    """Entries, each pooled over a group of positions, and the rows still to be pooled.

    Attributes:
        raw: float32 `[b, 2 * ratio + max_block, x]`; a ring of what a position contributes.
        pages: `[num_pages, page_size, width]`; entry i of a row lies in slot i of its pages.
    """

    raw: jax.Array
    pages: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["window", "entries", "keys"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """What one layer keeps.

    Attributes:
        window: `[b, sliding_window + max_block, head_dim]`; a ring of shared keys and values.
        entries: compressed keys and values; None in a layer with ratio 0.
        keys: the indexer's compressed keys; None in a layer without an indexer.
    """

    window: jax.Array
    entries: Compressed | None
    keys: Compressed | None


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["layers", "pages"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class CompressedCache:
    """The cache of all layers.

    Attributes:
        layers: one a layer.
        pages: a table for each ratio; a page holds `page_size` entries.
    """

    layers: tuple[LayerCache, ...]
    pages: PageTables

    def page_table(self, ratio: int) -> jax.Array | None:
        """The table of a layer with this ratio; None for 0, which has no entries."""
        return self.pages.table(ratio) if ratio else None

    def with_layer(self, layer: int, cache: LayerCache) -> "CompressedCache":
        """The cache after a layer has written its rows."""
        layers = (*self.layers[:layer], cache, *self.layers[layer + 1 :])
        return dataclasses.replace(self, layers=layers)


def empty_cache(
    ratios: tuple[int, ...],
    num_rows: int,
    max_block: int,
    pages: PageTables,
    options: CacheOptions,
    config: DeepseekV4Config,
    execution: Execution,
) -> CompressedCache:
    """A cache of zeros for layers of these ratios.

    Args:
        max_block: most tokens of a call of which some may be rejected, `g + 1`. A ring that
            keeps them besides what a valid read may touch never needs to be put back.
    """
    dtype = options.dtype or execution.dtype

    def zeros(shape: tuple[int, ...], dtype) -> jax.Array:
        return constrain(jnp.zeros(shape, dtype), ("rows", None, None), execution.mesh)

    def compressed(ratio: int, width: int) -> Compressed:
        halves = 2 if ratio == 4 else 1
        raw = zeros((num_rows, 2 * ratio + max_block, 2 * halves * width), jnp.float32)
        entries = zeros((pages.num_pages(ratio), options.page_size, width), dtype)
        return Compressed(raw, entries)

    def layer(ratio: int) -> LayerCache:
        window = (num_rows, config.sliding_window + max_block, config.head_dim)
        return LayerCache(
            window=zeros(window, dtype),
            entries=compressed(ratio, config.head_dim) if ratio else None,
            keys=compressed(ratio, config.index_head_dim) if ratio == 4 else None,
        )

    return CompressedCache(tuple(layer(ratio) for ratio in ratios), pages)
