/** Workers on pages that enforce Trusted Types. */

interface TrustedTypes {
  createPolicy(
    name: string,
    rules: { readonly createScriptURL: (url: string) => string },
  ): { createScriptURL(url: string): string };
}

/** As `trusted-types` of a Content-Security-Policy must name it. */
const POLICY = "nearfar";

let policy: ReturnType<TrustedTypes["createPolicy"]> | null = null;

/**
 * What `make` makes: a Worker of this package's own code. Where the page wants its URL trusted, it is by the
 * policy "nearfar". Bundlers must find `new Worker(new URL(…))` as it is, so it is the constructor that
 * trusts, for the time of the call.
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
