"""The recipes that there are, and their form as text, in which a replica's ModelInfo has one."""

import json

from runtime.media.recipes.idefics3 import Idefics3Recipe
from runtime.media.recipes.qwen2_vl import Qwen2VLRecipe
from runtime.media.recipes.recipe import Recipe

REGISTRY: dict[str, type[Recipe]] = {recipe.name: recipe for recipe in (Idefics3Recipe, Qwen2VLRecipe)}


def recipe_to_json(recipe: Recipe) -> str:
    """Returns the text for ModelInfo.media_json; equal for equal recipes."""
    return json.dumps({"name": recipe.name, **recipe.as_json()}, sort_keys=True, separators=(",", ":"))


def recipe_from_json(text: str) -> Recipe:
    """Makes a recipe from what `recipe_to_json` returned. Raises ValueError, which names what is not known."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a recipe is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError("a recipe is not a JSON object")
    name = values.pop("name", None)
    if name not in REGISTRY:
        raise ValueError(f"the recipe {name!r} is not known; {', '.join(sorted(REGISTRY))} are")
    return REGISTRY[name].of(values)
