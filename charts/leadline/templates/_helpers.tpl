{{- define "leadline.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Names of cluster-wide objects hold the namespace too: two releases may have the same name in two namespaces. */}}
{{- define "leadline.clusterName" -}}
{{- printf "%s:%s" .Release.Namespace (include "leadline.fullname" .) -}}
{{- end -}}

{{/* Call with (dict "root" $ "component" "gateway"). */}}
{{- define "leadline.selector" -}}
app.kubernetes.io/name: leadline
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "leadline.labels" -}}
{{ include "leadline.selector" . }}
app.kubernetes.io/part-of: leadline
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* name, namespace, labels and annotations. Takes a further "annotations" and "suffix" (the component by default). */}}
{{- define "leadline.metadata" -}}
name: {{ include "leadline.fullname" .root }}-{{ .suffix | default .component }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "leadline.labels" . | nindent 2 }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "leadline.clusterMetadata" -}}
name: {{ include "leadline.clusterName" .root }}-{{ .component }}
labels:
  {{- include "leadline.labels" . | nindent 2 }}
{{- with .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "leadline.image" -}}
{{- printf "%s:%s" .image.repository (.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}

{{/* Settings of every pod: what the restricted Pod Security level wants, and where it may run. */}}
{{- define "leadline.pod" -}}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  seccompProfile: {type: RuntimeDefault}
{{- $values := index .root.Values .component }}
{{- with $values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- if $values.affinity }}
affinity: {{ toYaml $values.affinity | nindent 2 }}
{{- else if gt (int ($values.replicas | default 1)) 1 }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{ include "leadline.selector" . | nindent 8 }}
{{- end }}
{{- end -}}

{{- define "leadline.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
resources: {{ toYaml (index .root.Values .component).resources | nindent 2 }}
{{- end -}}

{{- define "leadline.podLabels" -}}
{{- with (index .root.Values .component).podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "leadline.hasRedis" -}}
{{- if or .Values.valkey.enabled .Values.externalRedis.url .Values.externalRedis.existingSecret }}yes{{ end -}}
{{- end -}}

{{- define "leadline.redisSecret" -}}
{{- if and (not .Values.valkey.enabled) .Values.externalRedis.existingSecret -}}
{{ .Values.externalRedis.existingSecret }}
{{- else -}}
{{ include "leadline.fullname" . }}-redis
{{- end -}}
{{- end -}}

{{/* The environment variable that holds the URL, in a list of env. */}}
{{- define "leadline.redisEnv" -}}
{{- if include "leadline.hasRedis" . -}}
- name: LEADLINE_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ include "leadline.redisSecret" . }}
      key: {{ ternary "url" .Values.externalRedis.existingSecretKey (or .Values.valkey.enabled (not .Values.externalRedis.existingSecret)) }}
{{- end -}}
{{- end -}}

{{/* Changes when the Redis that pods talk to changes, without telling a password. */}}
{{- define "leadline.redisChecksum" -}}
{{- list .Values.valkey.enabled .Values.valkey.password .Values.externalRedis | toJson | sha256sum | trunc 16 -}}
{{- end -}}

{{- define "leadline.validate" -}}
{{- if and .Values.valkey.enabled (or .Values.externalRedis.url .Values.externalRedis.existingSecret) -}}
{{- fail "externalRedis is set, but valkey.enabled is true: set valkey.enabled to false to use a Redis of your own" -}}
{{- end -}}
{{- if and .Values.externalRedis.url .Values.externalRedis.existingSecret -}}
{{- fail "set externalRedis.url or externalRedis.existingSecret, not both" -}}
{{- end -}}
{{- if and .Values.gateway.ingress.enabled (not .Values.gateway.ingress.hosts) -}}
{{- fail "gateway.ingress.hosts must name a host when gateway.ingress.enabled is true" -}}
{{- end -}}
{{- if and .Values.gateway.httpRoute.enabled (not .Values.gateway.httpRoute.parentRefs) -}}
{{- fail "gateway.httpRoute.parentRefs must name a Gateway when gateway.httpRoute.enabled is true" -}}
{{- end -}}
{{- end -}}
