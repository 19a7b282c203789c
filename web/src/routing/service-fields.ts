// Written by `python -m nearfar.format.generate` from nearfar.format.service_fields: change it there.

/**
 * Fields that a client of a service and a device sends to the service alone. The device rejects every other
 * field that it does not know.
 */
export const SERVICE_FIELDS = [
  "model",
  "user",
  "metadata",
  "store",
  "service_tier",
  "prompt_cache_key",
  "prompt_cache_retention",
  "safety_identifier",
] as const;
