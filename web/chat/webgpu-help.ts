/** Explains to people what to do when their browser gives the page no GPU. */

export interface Help {
  readonly title: string;
  readonly text: string;
  /** One line per browser, the present one first. */
  readonly steps: readonly string[];
}

const BROWSERS: readonly { readonly name: string; readonly pattern: RegExp; readonly step: string }[] = [
  {
    name: "Edge",
    pattern: /Edg\//,
    step: "Edge: update to 113 or newer and switch on graphics acceleration (edge://settings/system).",
  },
  {
    name: "Chrome",
    pattern: /Chrome\//,
    step:
      "Chrome: update to 113 or newer (121 on Android) and switch on graphics acceleration " +
      "(chrome://settings/system). On Linux also enable “Unsafe WebGPU Support” in chrome://flags. " +
      "chrome://gpu says what is blocked.",
  },
  {
    name: "Firefox",
    pattern: /Firefox\//,
    step:
      "Firefox: 141 or newer on Windows, 145 or newer on Macs with Apple silicon; " +
      "elsewhere set dom.webgpu.enabled in about:config.",
  },
  {
    name: "Safari",
    pattern: /Safari\//,
    step:
      "Safari: version 26 or newer, which comes with macOS 26, iOS 26 and iPadOS 26 (all browsers on iOS " +
      "need it).",
  },
];

/**
 * Returns null where the browser trusts the page's address; else advice. An untrusted address has neither
 * WebGPU nor the hashes and the storage that every artifact needs.
 */
export function insecureHelp(): Help | null {
  if (window.isSecureContext) return null;
  return {
    title: "This address is not secure, so the browser gives it no GPU",
    text:
      "Browsers offer WebGPU over https and on localhost only, " +
      `and this page came from ${location.origin}.`,
    steps: ["Open the page on the machine that serves it, through localhost.", "Or serve it over https."],
  };
}

/** Returns null where WebGPU is available; else what is missing and what helps. */
export async function webgpuHelp(): Promise<Help | null> {
  // Older browsers lack it, although the type says that it always exists.
  const gpu = (navigator as { readonly gpu?: GPU }).gpu;
  if (gpu === undefined) {
    return {
      title: "WebGPU is missing in this browser",
      text: "The model runs on the graphics processor of this device, which the page reaches through WebGPU.",
      steps: steps(navigator.userAgent),
    };
  }
  if ((await gpu.requestAdapter()) === null) {
    return {
      title: "The browser found no usable graphics processor",
      text:
        "WebGPU is there, but it offers no adapter: graphics acceleration may be off, or the driver is " +
        "blocked or too old.",
      steps: ["Update the graphics driver and restart the browser.", ...steps(navigator.userAgent)],
    };
  }
  return null;
}

export function steps(userAgent: string): string[] {
  // The first pattern that fits is the browser: Edge also says Chrome, and Chrome also says Safari.
  const present = BROWSERS.find(({ pattern }) => pattern.test(userAgent));
  const others = BROWSERS.filter((browser) => browser !== present);
  return [...(present ? [present] : []), ...others].map(({ step }) => step);
}
