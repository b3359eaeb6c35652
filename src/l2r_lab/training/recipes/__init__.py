"""Recipes: YAML files inside the package and the schema that reads them.

Begin at load.py; schema.py has every field.
"""

from typing import TYPE_CHECKING

from l2r.imports import lazy_names

if TYPE_CHECKING:
    from l2r_lab.training.recipes.load import LENGTH_FIELDS as LENGTH_FIELDS
    from l2r_lab.training.recipes.load import AnyRecipe as AnyRecipe
    from l2r_lab.training.recipes.load import check_sections as check_sections
    from l2r_lab.training.recipes.load import dump_recipe as dump_recipe
    from l2r_lab.training.recipes.load import first_problem as first_problem
    from l2r_lab.training.recipes.load import load_recipe as load_recipe
    from l2r_lab.training.recipes.load import load_sections as load_sections
    from l2r_lab.training.recipes.load import packaged_recipes as packaged_recipes
    from l2r_lab.training.recipes.load import parse_recipe as parse_recipe
    from l2r_lab.training.recipes.load import recipe_header as recipe_header
    from l2r_lab.training.recipes.load import recipe_names as recipe_names
    from l2r_lab.training.recipes.load import recipe_values as recipe_values
    from l2r_lab.training.recipes.load import recipes_in as recipes_in
    from l2r_lab.training.recipes.load import set_field as set_field
    from l2r_lab.training.recipes.schema import PIXELS as PIXELS
    from l2r_lab.training.recipes.schema import CorpusVersion as CorpusVersion
    from l2r_lab.training.recipes.schema import LanguageRecipe as LanguageRecipe
    from l2r_lab.training.recipes.schema import LossSection as LossSection
    from l2r_lab.training.recipes.schema import OptimizerSection as OptimizerSection
    from l2r_lab.training.recipes.schema import RecipeSection as RecipeSection
    from l2r_lab.training.recipes.vision_schema import ImageSection as ImageSection
    from l2r_lab.training.recipes.vision_schema import VisionRecipe as VisionRecipe
    from l2r_lab.training.recipes.vision_schema import VitSection as VitSection
else:
    __getattr__, __dir__ = lazy_names(__name__)
