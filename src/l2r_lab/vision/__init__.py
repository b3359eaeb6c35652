"""Images as training sees them: augmentation, and what is measured of a data set."""

from typing import TYPE_CHECKING

from l2r.imports import lazy_names

if TYPE_CHECKING:
    from l2r_lab.vision.augmentation import augment as augment
    from l2r_lab.vision.pixel_facts import ImageFacts as ImageFacts
    from l2r_lab.vision.pixel_facts import image_facts as image_facts
    from l2r_lab.vision.pixel_facts import mean_and_deviation as mean_and_deviation
else:
    __getattr__, __dir__ = lazy_names(__name__)
