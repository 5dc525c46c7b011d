"""The CRD, generated from `leadline.protocol.isvc_types` by `python -m leadline.operator.crd`.

generate   the whole manifest and the command line
schema     a type as an OpenAPI schema
"""

__all__: list[str] = []
