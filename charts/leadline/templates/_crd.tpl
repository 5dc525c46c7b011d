{{/* Whether this release brought the CRD. Call with (dict "root" $ "crd" what lookup found). */}}
{{- define "leadline.ownsCrd" -}}
{{- $owner := dig "metadata" "annotations" (dict) .crd -}}
{{- if and (eq (get $owner "meta.helm.sh/release-name") .root.Release.Name) (eq (get $owner "meta.helm.sh/release-namespace") .root.Release.Namespace) }}yes{{ end -}}
{{- end -}}

{{/* Paths of fields that one schema has and another lacks, each with a space behind it.
     Call with (dict "path" "" "ours" a "theirs" b), two openAPIV3Schemas. */}}
{{- define "leadline.missingFields" -}}
{{- $theirs := dig "properties" (dict) .theirs -}}
{{- range $name, $schema := dig "properties" (dict) .ours -}}
{{- $path := printf "%s.%s" $.path $name -}}
{{- if not (hasKey $theirs $name) }}{{ $path }} {{ else }}{{ include "leadline.missingFields" (dict "path" $path "ours" $schema "theirs" (get $theirs $name)) }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* The same for the chart's CRD and that of the cluster. */}}
{{- define "leadline.crdLacks" -}}
{{- $ours := (first (.root.Files.Get "files/crd.yaml" | fromYaml).spec.versions).schema.openAPIV3Schema -}}
{{- range .crd.spec.versions -}}
{{- if .storage }}{{ include "leadline.missingFields" (dict "path" "" "ours" $ours "theirs" .schema.openAPIV3Schema) }}{{ end -}}
{{- end -}}
{{- end -}}
