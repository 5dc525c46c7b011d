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
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Of pods: nothing that changes with every version of the chart, or an upgrade would replace pods that stay as they are. */}}
{{- define "leadline.podMetadata" -}}
labels:
  {{- $theirs := list (.root.Values.commonLabels | default dict) ((index .root.Values .component).podLabels | default dict) }}
  {{- include "leadline.mergedLabels" (dict "below" (dict) "theirs" $theirs "above" (include "leadline.selector" . | fromYaml)) | nindent 2 }}
annotations:
  leadline.io/redis: {{ include "leadline.redisChecksum" .root }}
  {{- with merge (dict) ((index .root.Values .component).podAnnotations | default dict) (.root.Values.commonAnnotations | default dict) }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Of objects. Takes further "labels". */}}
{{- define "leadline.labels" -}}
{{- $below := dict "app.kubernetes.io/version" .root.Chart.AppVersion -}}
{{- $above := dict "app.kubernetes.io/managed-by" .root.Release.Service "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version) -}}
{{- $above = merge $above (include "leadline.selector" . | fromYaml) -}}
{{- include "leadline.mergedLabels" (dict "below" $below "theirs" (list (.root.Values.commonLabels | default dict) (.labels | default dict)) "above" $above) -}}
{{- end -}}

{{/* One map, since a key may stand in it once: users' labels go over those that only inform, and under those that
     selectors and helm go by. Call with (dict "below" a "theirs" (list b c) "above" d); the later one wins. */}}
{{- define "leadline.mergedLabels" -}}
{{- $labels := mergeOverwrite (dict "app.kubernetes.io/part-of" "leadline") .below -}}
{{- range .theirs }}{{ $labels = mergeOverwrite $labels . }}{{ end -}}
{{- mergeOverwrite $labels .above | toYaml -}}
{{- end -}}

{{/* name, namespace, labels and annotations. Takes further "labels" and "annotations", and "suffix" (the component by default)
     or the whole "name". */}}
{{- define "leadline.metadata" -}}
name: {{ .name | default (printf "%s-%s" (include "leadline.fullname" .root) (.suffix | default .component)) }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "leadline.labels" . | nindent 2 }}
{{- with merge (dict) (.annotations | default dict) (.root.Values.commonAnnotations | default dict) }}
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

{{/* Whether more than one pod may run at a time. */}}
{{- define "leadline.several" -}}
{{- $values := index .root.Values .component -}}
{{- if dig "autoscaling" "enabled" false $values -}}
{{- if gt (int $values.autoscaling.maxReplicas) 1 }}yes{{ end -}}
{{- else if gt (int ($values.replicas | default 1)) 1 }}yes{{ end -}}
{{- end -}}

{{- define "leadline.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Settings of every pod: what the restricted Pod Security level wants, and where it may run. */}}
{{- define "leadline.pod" -}}
{{- include "leadline.pullSecrets" .root }}
{{- $values := index .root.Values .component }}
securityContext: {{ toYaml $values.podSecurityContext | nindent 2 }}
{{- with $values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- if $values.topologySpreadConstraints }}
topologySpreadConstraints: {{ toYaml $values.topologySpreadConstraints | nindent 2 }}
{{- else if not $values.affinity }}
{{- /* With one pod too, so that a second one replaces nothing. */}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{ include "leadline.selector" . | nindent 8 }}
{{- end }}
{{- end -}}

{{- define "leadline.container" -}}
securityContext: {{ toYaml (index .root.Values .component).securityContext | nindent 2 }}
resources: {{ toYaml (index .root.Values .component).resources | nindent 2 }}
{{- end -}}

{{/* Evictions one by one, where there are several pods. */}}
{{- define "leadline.disruptionBudget" -}}
{{- $values := index .root.Values .component }}
{{- if and (include "leadline.several" .) $values.podDisruptionBudget.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "leadline.metadata" . | nindent 2 }}
spec:
  maxUnavailable: {{ $values.podDisruptionBudget.maxUnavailable }}
  selector:
    matchLabels: {{ include "leadline.selector" . | nindent 6 }}
{{- end }}
{{- end -}}

{{- define "leadline.hasRedis" -}}
{{- if or .Values.valkey.enabled .Values.externalRedis.url .Values.externalRedis.existingSecret .Values.externalRedis.host }}yes{{ end -}}
{{- end -}}

{{/* The Secret of this release, with the key url, or for its own Valkey the passwords of its users. Nothing: there is none. */}}
{{- define "leadline.ownSecret" -}}
{{- if or (and .Values.valkey.enabled (not .Values.valkey.existingSecret)) (and (not .Values.valkey.enabled) .Values.externalRedis.url) -}}
{{ include "leadline.fullname" . }}-redis
{{- end -}}
{{- end -}}

{{- define "leadline.valkeyHost" -}}
{{ include "leadline.fullname" . }}-valkey.{{ .Release.Namespace }}.svc
{{- end -}}

{{- define "leadline.secretEnv" -}}
- name: {{ .name }}
  valueFrom:
    secretKeyRef:
      name: {{ .secret }}
      key: {{ .key }}
{{- end -}}

{{/* The variable with the password of a user of our Valkey, gateway or operator. */}}
{{- define "leadline.valkeyPassword" -}}
{{- $own := include "leadline.ownSecret" .root -}}
{{- $key := index .root.Values.valkey.existingSecretKeys .user -}}
{{- include "leadline.secretEnv" (dict "name" .name "secret" ($own | default .root.Values.valkey.existingSecret) "key" (ternary (printf "%s-password" .user) $key (not (empty $own)))) -}}
{{- end -}}

{{/* The operator's environment: an administrator's URL, with which it makes a user for each service, or the URL that all
     engines use. */}}
{{- define "leadline.operatorRedisEnv" -}}
{{- $external := .Values.externalRedis -}}
{{- if .Values.valkey.enabled -}}
{{ include "leadline.valkeyPassword" (dict "root" . "user" "operator" "name" "REDIS_PASSWORD") }}
- name: LEADLINE_REDIS_ADMIN_URL
  value: "redis://operator:$(REDIS_PASSWORD)@{{ include "leadline.valkeyHost" . }}:6379/0"
{{- else if $external.adminSecret.name -}}
{{ include "leadline.secretEnv" (dict "name" "LEADLINE_REDIS_ADMIN_URL" "secret" $external.adminSecret.name "key" $external.adminSecret.key) }}
{{- else if $external.enginesSecret.name -}}
{{ include "leadline.secretEnv" (dict "name" "LEADLINE_REDIS_URL" "secret" $external.enginesSecret.name "key" $external.enginesSecret.key) }}
{{- else -}}
{{ include "leadline.redisEnv" . }}
{{- end -}}
{{- end -}}

{{/* The gateway's environment with the URL. The kubelet puts a password of a Secret into it. */}}
{{- define "leadline.redisEnv" -}}
{{- $external := .Values.externalRedis -}}
{{- $url := "LEADLINE_REDIS_URL" -}}
{{- if .Values.valkey.enabled -}}
{{ include "leadline.valkeyPassword" (dict "root" . "user" "gateway" "name" "REDIS_PASSWORD") }}
- name: {{ $url }}
  value: "redis://gateway:$(REDIS_PASSWORD)@{{ include "leadline.valkeyHost" . }}:6379/0"
{{- else if include "leadline.ownSecret" . -}}
{{ include "leadline.secretEnv" (dict "name" $url "secret" (include "leadline.ownSecret" .) "key" "url") }}
{{- else if $external.existingSecret -}}
{{ include "leadline.secretEnv" (dict "name" $url "secret" $external.existingSecret "key" $external.existingSecretKey) }}
{{- else if $external.host -}}
{{- $who := "" -}}
{{- if $external.passwordSecret.name -}}
{{- $who = printf "%s:$(REDIS_PASSWORD)@" $external.username -}}
{{ include "leadline.secretEnv" (dict "name" "REDIS_PASSWORD" "secret" $external.passwordSecret.name "key" $external.passwordSecret.key) }}
{{ end -}}
- name: {{ $url }}
  value: "{{ ternary "rediss" "redis" $external.tls }}://{{ $who }}{{ $external.host }}:{{ $external.port }}/{{ $external.database }}"
{{- end -}}
{{- end -}}

{{/* Changes when the Redis that pods talk to changes, without telling a password. */}}
{{- define "leadline.redisChecksum" -}}
{{- list .Values.valkey.enabled .Values.valkey.passwords .Values.valkey.existingSecret .Values.externalRedis | toJson | sha256sum | trunc 16 -}}
{{- end -}}

{{- define "leadline.validate" -}}
{{- $ways := list -}}
{{- range $key := list "url" "existingSecret" "host" -}}
{{- if index $.Values.externalRedis $key }}{{ $ways = append $ways (printf "externalRedis.%s" $key) }}{{ end -}}
{{- end -}}
{{- if and .Values.valkey.enabled $ways -}}
{{- fail (printf "%s is set, but valkey.enabled is true: set valkey.enabled to false to use a Redis of your own" (first $ways)) -}}
{{- end -}}
{{- if gt (len $ways) 1 -}}
{{- fail (printf "set one of %s, not %d" (join ", " $ways) (len $ways)) -}}
{{- end -}}
{{- if and (or .Values.valkey.passwords.gateway .Values.valkey.passwords.operator) .Values.valkey.existingSecret -}}
{{- fail "set valkey.passwords or valkey.existingSecret, not both" -}}
{{- end -}}
{{- if and .Values.externalRedis.adminSecret.name .Values.externalRedis.enginesSecret.name -}}
{{- fail "set externalRedis.adminSecret (a user for each service) or externalRedis.enginesSecret (one user for all engines), not both" -}}
{{- end -}}
{{- if and (or .Values.externalRedis.adminSecret.name .Values.externalRedis.enginesSecret.name) (not $ways) -}}
{{- fail "externalRedis.adminSecret and externalRedis.enginesSecret are for a Redis of yours: set externalRedis.url, existingSecret or host too, for the gateway" -}}
{{- end -}}
{{- include "leadline.onlyOperator" . -}}
{{- with .Values.gateway.autoscaling -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail (printf "gateway.autoscaling.minReplicas (%d) must not be greater than maxReplicas (%d)" (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- if hasKey (dig "server" (dict) (.Values.gateway.config | default dict)) "port" -}}
{{- fail "gateway.config.server.port is the chart's: set gateway.service.port, at which clients find it" -}}
{{- end -}}
{{- if hasKey (dig "server" (dict) (.Values.gateway.config | default dict)) "metrics_port" -}}
{{- fail "gateway.config.server.metrics_port is the chart's: the port `metrics` of the gateway's pods" -}}
{{- end -}}
{{- if and .Values.gateway.ingress.enabled (not .Values.gateway.ingress.hosts) -}}
{{- fail "gateway.ingress.hosts must name a host when gateway.ingress.enabled is true" -}}
{{- end -}}
{{- if and .Values.gateway.httpRoute.enabled (not .Values.gateway.httpRoute.parentRefs) -}}
{{- fail "gateway.httpRoute.parentRefs must name a Gateway when gateway.httpRoute.enabled is true" -}}
{{- end -}}
{{- end -}}

{{/* Two operators that act on the same services undo each other's work, and pods roll for ever. Where charts are rendered
     without the cluster, nothing is known of others. Who may install into one namespace only may not look beyond it, which
     would be an error: with namespaced=true and crds.install=false, releases that serve all namespaces are not seen. */}}
{{- define "leadline.onlyOperator" -}}
{{- if and .Values.operator.enabled .Values.operator.replicas (not (contains "--namespace" (join " " .Values.operator.extraArgs))) -}}
{{- $group := "rbac.authorization.k8s.io/v1" -}}
{{- $bindings := (lookup $group "RoleBinding" (ternary .Release.Namespace "" .Values.namespaced) "").items | default list -}}
{{- if or .Values.crds.install (not .Values.namespaced) -}}
{{- $bindings = concat $bindings ((lookup $group "ClusterRoleBinding" "" "").items | default list) -}}
{{- end -}}
{{- range $bindings -}}
{{- $labels := .metadata.labels | default dict -}}
{{- $operator := and (eq (get $labels "app.kubernetes.io/name") "leadline") (eq (get $labels "app.kubernetes.io/component") "operator") (hasSuffix "-operator" .metadata.name) -}}
{{- if and $operator (eq (get $labels "serving.leadline.io/operator") $.Values.operator.name) -}}
{{- $release := get $labels "app.kubernetes.io/instance" -}}
{{- $where := (first .subjects).namespace -}}
{{- if or (ne $release $.Release.Name) (ne $where $.Release.Namespace) -}}
{{- fail (printf "the release %s in the namespace %s looks after the same services, and two operators undo each other's work: set operator.name here, and that name in the label serving.leadline.io/operator of the services that are to be this one's" $release $where) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
