{{- define "gangline.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name }}{{ end }}
{{- end }}

{{- define "gangline.secret" -}}
{{ .Values.existingSecret | default (include "gangline.name" .) }}
{{- end }}

{{- define "gangline.selector" -}}
app.kubernetes.io/name: gangline
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "gangline.labels" -}}
{{ include "gangline.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end }}

{{- define "gangline.image" -}}
image: {{ printf "%s:%s" (required "set image.repository" .Values.image.repository) (.Values.image.tag | default .Chart.AppVersion) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{- define "gangline.env" -}}
# Below the volume's own folder, which belongs to root.
- {name: GANGLINE_DATA, value: /data/gangline}
- name: GANGLINE_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ include "gangline.secret" . }}, key: token}
{{- end }}

{{- define "gangline.placement" -}}
{{- range $key := list "nodeSelector" "tolerations" "affinity" }}
{{- with index $.values $key }}
{{ $key }}:
{{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}
