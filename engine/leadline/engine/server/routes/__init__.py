"""All routes but the generation APIs.

service   models, tokenize, health, metrics, administration, profiles
openapi   the document that describes all routes

Import the modules, not this package.
"""
