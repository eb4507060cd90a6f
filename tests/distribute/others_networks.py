"""Networks that others wrote, of Flax and of the extra `networks`; ImportError where one is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from distribute.beside_one_process import Network, network


def moved(tree: Any) -> Any:
    """Return parameters in float64, moved off zeros and ones."""

    def one(p: Any) -> Any:
        return p.astype(jnp.float64) + 0.05 * jnp.cos(jnp.arange(p.size)).reshape(p.shape)

    return jax.tree.map(one, tree)


def of_equinox(model: Any, shape: tuple[int, ...], *grids: tuple[int, ...], **options: Any) -> Network:
    """Return a network of a module of Equinox; its arrays of floating point are the parameters."""
    import equinox as eqx

    params, rest = eqx.partition(model, eqx.is_inexact_array)
    return Network(lambda p, x: eqx.combine(p, rest)(x, **options), moved(params), shape, grids)


def of_haiku(net: Callable[[Any], Any], shape: tuple[int, ...], *grids: tuple[int, ...]) -> Network:
    """Return a network of Haiku, with its state as it is at first."""
    import haiku as hk

    f = hk.without_apply_rng(hk.transform_with_state(net))
    params, state = f.init(jax.random.key(0), jnp.zeros(shape))
    return Network(lambda p, x: f.apply(p, state, x)[0], moved(params), shape, grids)


@network
def flax_unet_with_statistics() -> Network:
    """Three dimensions, batch statistics, dropout of a fixed key."""
    from flax import nnx

    options: dict[str, Any] = {"param_dtype": jnp.float64}

    class Block(nnx.Module):
        def __init__(self, a: int, b: int, rngs: nnx.Rngs) -> None:
            self.conv = nnx.Conv(a, b, (3, 3, 3), rngs=rngs, **options)
            self.norm = nnx.BatchNorm(b, rngs=rngs, **options)
            self.dropout = nnx.Dropout(0.3, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.dropout(nnx.gelu(self.norm(self.conv(x))))

    class UNet(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.fine, self.coarse, self.joined = Block(1, 2, rngs), Block(2, 3, rngs), Block(4, 2, rngs)
            self.up = nnx.ConvTranspose(3, 2, (2, 2, 2), (2, 2, 2), rngs=rngs, **options)
            self.last = nnx.Conv(2, 1, (1, 1, 1), rngs=rngs, **options)

        def __call__(self, x: Any) -> Any:
            fine = self.fine(x)
            up = self.up(self.coarse(nnx.max_pool(fine, (2, 2, 2), (2, 2, 2))))
            return self.last(self.joined(jnp.concatenate([fine, up], -1)))

    graph, params, rest = nnx.split(UNet(nnx.Rngs(0, dropout=1)), nnx.Param, ...)
    return Network(
        lambda p, x: nnx.merge(graph, p, rest, copy=True)(x),
        moved(params),
        (2, 10, 6, 4, 1),
        ((1, 3, 1, 1, 1), (2, 2, 1, 1, 1)),
    )


@network
def haiku_resnet() -> Network:
    import haiku as hk

    return of_haiku(lambda x: hk.nets.ResNet18(10)(x, is_training=True), (2, 64, 64, 3), (1, 2, 1, 1))


@network
def haiku_mobilenet() -> Network:
    import haiku as hk

    return of_haiku(lambda x: hk.nets.MobileNetV1(num_classes=5)(x, is_training=True), (2, 64, 64, 3), (1, 2, 1, 1))


@network
def pdequinox_unet() -> Network:
    import pdequinox

    model = pdequinox.arch.ClassicUNet(
        3, 1, 1, hidden_channels=4, num_levels=2, boundary_mode="periodic", key=jax.random.key(0)
    )
    return of_equinox(model, (1, 20, 12, 8), (1, 3, 1, 1), (1, 2, 2, 1))


@network
def pdequinox_fno() -> Network:
    import pdequinox

    model = pdequinox.arch.ClassicFNO(3, 1, 1, hidden_channels=4, num_modes=3, num_blocks=2, key=jax.random.key(0))
    return of_equinox(model, (1, 20, 12, 8), (1, 3, 1, 1))


@network
def pdequinox_dilated() -> Network:
    import pdequinox

    model = pdequinox.arch.DilatedResNet(
        2, 1, 1, hidden_channels=4, num_blocks=1, boundary_mode="dirichlet", key=jax.random.key(0)
    )
    return of_equinox(model, (1, 20, 12), (1, 4, 1))


@network
def foundax_unet() -> Network:
    import foundax

    model = foundax.unet3d(1, 1, depth=2, wf=2, norm="layer", activation=jax.nn.celu, key=jax.random.key(0))
    return of_equinox(model, (16, 16, 16, 1), (3, 1, 1, 1), (2, 2, 1, 1))


@network
def foundax_mpp() -> Network:
    from foundax import mpp

    model = mpp._build(embed_dim=24, processor_blocks=1, n_states=2, num_heads=3, key=jax.random.key(0))
    return of_equinox(model, (1, 2, 64, 64, 2), (1, 1, 2, 1, 1))


@network
def norax_fno() -> Network:
    from norax import models

    return of_equinox(
        models.FNO(jax.random.key(0), 1, 1, n_modes=(4, 4, 4), width=8, depth=2), (12, 10, 8, 1), (3, 1, 1, 1)
    )


@network
def equimo_vit() -> Network:
    import equimo.vision.models as models

    key = jax.random.key(0)
    model = models.VisionTransformer(
        img_size=32, in_channels=3, dim=24, patch_size=4, num_heads=[2], depths=[2], num_classes=5, key=key
    )
    return of_equinox(model, (3, 32, 32), (1, 3, 1), (1, 2, 2), key=key, inference=False)
