"""Images that a classifier is measured on: digits, Fashion-MNIST, folders, as batches.

Imports text/ and below. Begin at image_input.py.
"""

from typing import TYPE_CHECKING

from l2r.imports import lazy_names

BUILT_IN_IMAGES = ("digits", "fashion-mnist")  # other names are places, which may move

if TYPE_CHECKING:
    from l2r.images.image_input import ImageInput as ImageInput
    from l2r.images.image_input import open_image_input as open_image_input
    from l2r.images.image_sources import UNREADABLE as UNREADABLE
    from l2r.images.image_sources import ImageSource as ImageSource
    from l2r.images.image_sources import open_images as open_images
    from l2r.images.image_sources import shown_size as shown_size
    from l2r.images.images import CenterCrop as CenterCrop
    from l2r.images.images import ImageDataset as ImageDataset
    from l2r.images.images import ImageLoader as ImageLoader
    from l2r.images.images import RandomCrop as RandomCrop
    from l2r.images.images import read_ahead as read_ahead
    from l2r.images.images import sample_indices as sample_indices
    from l2r.images.images import standardize as standardize
    from l2r.images.preparation import Preparation as Preparation
    from l2r.images.preparation import Standard as Standard
else:
    __getattr__, __dir__ = lazy_names(__name__)
