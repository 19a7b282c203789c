/** Workers on pages that enforce Trusted Types. */

interface TrustedTypes {
  createPolicy(
    name: string,
    rules: { readonly createScriptURL: (url: string) => string },
  ): { createScriptURL(url: string): string };
}

/** The name that `trusted-types` of a Content-Security-Policy has to list. */
const POLICY = "nearfar";

let policy: ReturnType<TrustedTypes["createPolicy"]> | null = null;

/**
 * Runs `make`, which makes a Worker of this package's code. On a page that enforces Trusted Types, the policy
 * "nearfar" trusts its URL. Bundlers must find `new Worker(new URL(…))` unchanged, so `Worker` is replaced
 * during this call by a subclass that makes a trusted URL.
 */
export function trusted(make: () => Worker): Worker {
  const scope = globalThis as typeof globalThis & { readonly trustedTypes?: TrustedTypes };
  try {
    return make();
  } catch (error) {
    if (!scope.trustedTypes || !(error instanceof TypeError)) throw error;
    policy ??= scope.trustedTypes.createPolicy(POLICY, { createScriptURL: (url) => url });
  }
  const { Worker: Native } = scope;
  const trust = policy;
  class Trusting extends Native {
    constructor(url: string | URL, options?: WorkerOptions) {
      super(trust.createScriptURL(String(url)), options);
    }
  }
  scope.Worker = Trusting;
  try {
    return make();
  } finally {
    scope.Worker = Native;
  }
}
