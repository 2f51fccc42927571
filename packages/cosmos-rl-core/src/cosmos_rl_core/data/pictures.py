"""Pictures read with Pillow (the extra `media`), as people see them: upright, in RGB, over white. No torch.

content --Image.open--> header --turn by EXIF--> grey of 16 bits and floats to 8 bits --> over white --> RGB
"""

from __future__ import annotations

import threading
import warnings
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from cosmos_rl_core.errors import MediaError

_BITS, _PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0
"""Tags of TIFF 6.0: bits of a sample, and the meaning of 0."""
_opening = threading.Lock()


def open_picture(file: BinaryIO, *, formats: tuple[str, ...]) -> Image.Image | None:
    """Read the header of a picture; None for a file of none of the `formats`, which are named as by Pillow.

    Raises:
        MediaError: it is damaged, or a decompression bomb.
    """
    try:
        with _opening, warnings.catch_warnings():  # filters of warnings are those of all threads
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # callers have limits of their own
            return Image.open(file, formats=formats)
    except UnidentifiedImageError:
        return None
    except Image.DecompressionBombError as error:
        raise MediaError(f"too large a picture: {error}") from error
    except Exception as error:  # of almost any class, by format
        raise MediaError(f"a damaged picture: {error}") from error


def upright_rgb(opened: Image.Image) -> Image.Image:
    """Decode a picture: turned and mirrored as its EXIF data says, white where it is transparent.

    Raises:
        MediaError: it is damaged, or white is not defined in its kind of pixels.
    """
    try:
        image = ImageOps.exif_transpose(opened)
        if image.mode == "F" or image.mode.startswith("I"):
            return _grey(image, opened)
        if not image.has_transparency_data:
            return image.convert("RGB")
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    except MediaError:
        raise
    except Exception as error:  # of almost any class, by format
        raise MediaError(f"a damaged picture: {error}") from error


def _grey(image: Image.Image, opened: Image.Image) -> Image.Image:
    """Scale pixels of more than 8 bits: Pillow's own conversion clips them at 255."""
    tags = getattr(opened, "tag_v2", {})
    pixels = np.asarray(image)
    if image.mode == "F":
        white = 1.0
        if not (np.isfinite(pixels).all() and pixels.min() >= 0 and pixels.max() <= 1):
            raise MediaError("pixels are floats outside of 0 (black) to 1 (white); save it with 8 bits")
    elif image.mode != "I":
        white = 2.0 ** tags.get(_BITS, (16,))[0] - 1
    elif opened.format == "PPM":  # Pillow scales any to 16 bits
        white = 2.0**16 - 1
    else:
        raise MediaError("pixels are integers of 32 bits or with a sign, without a defined white; save it with 8 bits")
    scaled = pixels / white
    if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
        scaled = 1 - scaled
    scaled = np.where(pixels == opened.info.get("transparency"), 1, scaled)  # one grey may be transparent
    return Image.fromarray((255 * scaled).round().astype(np.uint8)).convert("RGB")
