"""DeepSeek-V4's cache: a window ring a layer, and what a compressing layer adds to it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp


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


@functools.partial(jax.tree_util.register_dataclass, data_fields=["layers", "page_tables"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class CompressedCache:
    """The cache of all layers.

    Attributes:
        layers: one a layer.
        page_tables: int32 `[b, pages_per_row]` for each ratio; a page holds `page_size` entries.
    """

    layers: tuple[LayerCache, ...]
    page_tables: dict[int, jax.Array]

    def with_layer(self, layer: int, cache: LayerCache) -> "CompressedCache":
        """The cache after a layer has written its rows."""
        layers = (*self.layers[:layer], cache, *self.layers[layer + 1 :])
        return dataclasses.replace(self, layers=layers)


def empty_layer(config, ratio: int, num_rows: int, num_pages: int, page_size: int, max_block: int, dtype) -> LayerCache:
    """Zeros for a layer of this ratio."""

    def compressed(width: int) -> Compressed:
        overlap = 2 if ratio == 4 else 1
        return Compressed(
            raw=jnp.zeros((num_rows, 2 * ratio + max_block, 2 * overlap * width), jnp.float32),
            pages=jnp.zeros((num_pages, page_size, width), dtype),
        )

    return LayerCache(
        window=jnp.zeros((num_rows, config.sliding_window + max_block, config.head_dim), dtype),
        entries=compressed(config.head_dim) if ratio else None,
        keys=compressed(config.index_head_dim) if ratio == 4 else None,
    )
