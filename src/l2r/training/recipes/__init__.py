"""Recipes: YAML files inside the package and the schema that reads them."""
