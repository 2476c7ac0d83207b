"""Credit: from rewards to advantages to a loss; pure maths. Only `modpo.credit.loss` needs torch."""

from modpo.credit.recipe import Assignment, Recipe, assign, recipe, recipes

__all__ = ["Assignment", "Recipe", "assign", "recipe", "recipes"]
