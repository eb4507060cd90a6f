"""A picture of what the U-Net saw, should tell, and told: slices through the middle of the volume."""

from pathlib import Path

import jax
import numpy as np

from training import say

SHADES = " .:-=+*#%@"


def draw(tensors: list[jax.Array], out: Path, here: bool) -> None:
    """Draw the pressure, the target and the prediction, 1 x channels x n^3, on the worker that has them (`here`).

    As a picture where matplotlib is installed, else as text.
    """
    if not here:
        return
    slices = [np.asarray(tensor)[0, 0, :, tensor.shape[3] // 2] for tensor in tensors]
    names = ("pressure", "target: change beyond linear extrapolation", "prediction")
    try:
        import matplotlib
    except ImportError:
        for name, its in zip(names[1:], slices[1:], strict=True):
            say(f"{name}, depth downwards:")
            say("\n".join("  " + "".join(line) for line in _shaded(its, slices[1].min(), slices[1].max())))
        return
    matplotlib.use("Agg")  # no screen
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(11, 4), layout="constrained")
    for panel, name, its, scale in zip(panels, names, slices, (slices[0], slices[1], slices[1]), strict=True):
        most = np.abs(scale).max()
        image = panel.imshow(its, cmap="seismic", vmin=-most, vmax=most)
        panel.set(title=name, xlabel="voxels", ylabel="depth")
    figure.colorbar(image, ax=panels[1:], label="pressure")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    say(f"A slice of the last of them: {out}")


def _shaded(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Draw each value as a character, darker where it is larger; every second line, since characters are tall."""
    scaled = (values[::2] - low) / max(high - low, 1e-12) * len(SHADES)
    return np.array(list(SHADES))[np.clip(scaled.astype(int), 0, len(SHADES) - 1)]
