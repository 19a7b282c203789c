// For builds with Vite 6 and 7; Vite 8 needs no configuration.
export default { worker: { format: "es" } };
